"""Choice of a layout: step times of every layout, calibrated and corrected by live steps, and what decides by
them. Pure."""
