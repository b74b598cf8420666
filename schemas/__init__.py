"""The wire: versioned messages of every topic and the ids that tie them together. Imports only msgspec."""
