"""The flows, as Steps."""
