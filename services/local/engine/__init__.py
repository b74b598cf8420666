"""A small engine behind SGLang's `POST /generate`: SmolLM2-135M on one CPU thread. See command.py for the map."""
