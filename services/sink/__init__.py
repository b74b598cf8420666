"""Outcomes in, Parquet shards out: the service that decides what a record became."""
