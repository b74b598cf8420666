"""What people who run it ask: how far is it, what failed, what is set. Read by nobody but the command line."""
