"""Keep the KV cache of LLM serving engines, so that no prompt is computed twice.

Importing the package does nothing and costs nothing: it loads no torch, no vLLM and no numpy,
because engines import it in every one of their processes and the server must stay small. Take
what you need from the subpackages (`kvcellar.client`, `kvcellar.engines.vllm`, ...).
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
