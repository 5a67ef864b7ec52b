"""What the processes of a node say to each other: every message, the frames, the limits."""
