"""The catalogue of chunks, who reads and who writes them: pure, driven by the server alone."""
