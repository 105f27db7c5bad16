"""One verb per stage; verbs talk only through files."""
