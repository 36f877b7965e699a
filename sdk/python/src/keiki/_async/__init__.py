"""The source of both clients. ``sdk/python/unasync.py`` generates the modules of the same names
beside this package from these; a test checks that they are current."""
