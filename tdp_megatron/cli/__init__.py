"""The ``tdp`` command."""
