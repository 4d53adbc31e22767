"""Unit and property tests of the connector's pure parts."""
