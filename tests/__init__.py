"""The suite of promises; it mirrors ``infinity/``, and ``helpers/`` holds what it shares."""
