"""tokenhaul's services: kernel, ingest, generator, sink, dataset tools and what a laptop needs."""
