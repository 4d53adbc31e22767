"""Timelines of single transfers: reading what the connector wrote, aligning clocks, Chrome traces and pictures."""
