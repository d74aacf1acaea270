"""Random step times of two layouts, and how often the calibrator is right about them."""
