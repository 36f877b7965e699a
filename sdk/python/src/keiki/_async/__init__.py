"""The source of both twins. The modules beside this package that have the same names are made of these by
``sdk/python/unasync.py``; a test proves that they are current."""
