"""Tests with real engines: vLLM's CPU backend and real NIXL."""
