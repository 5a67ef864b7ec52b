"""The connector for vLLM: a scheduler half that decides, worker halves that copy.

vLLM makes `connector.KVCellarConnector` once in its scheduler's process and once in each worker's;
the two halves talk only through `metadata`, which vLLM carries with its steps.
"""
