"""Prompts in, outcomes out: the service that spends the GPU time."""
