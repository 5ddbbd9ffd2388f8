"""Schedules chosen: costs, what fits a GPU, the search, its measurements and its cache."""
