"""Connectors that run inside serving engines, one package an engine.

Only here may torch and an engine be imported; the server, the client library and the commands
never import this package.
"""
