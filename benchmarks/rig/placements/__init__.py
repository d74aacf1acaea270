"""Cases and scores of the placement benchmark."""
