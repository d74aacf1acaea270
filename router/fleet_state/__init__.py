"""The fleet as routing sees it: engines, targets, load, homes, dispatch costs. Pure; time comes in as an argument."""
