"""The library that the connector and the tools use to speak to a node's server."""
