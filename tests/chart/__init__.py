"""Tests of the chart, the plain install, the examples and the image."""
