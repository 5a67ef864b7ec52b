"""The HTTP pages, served by a process of their own so that no scrape delays a lookup."""
