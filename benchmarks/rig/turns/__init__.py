"""Switches of layout on real weights: a random model, rank processes that copy its parts, and figures of
engines that turn layers over under load."""
