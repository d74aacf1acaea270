"""Activity of experts as engines report it: windows that decay, gaps in reports, checks of what arrives. Pure."""
