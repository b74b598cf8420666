"""Records of files in, prompts out: the service that decides what is asked."""
