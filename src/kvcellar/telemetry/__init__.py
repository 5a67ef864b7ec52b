"""What people and their tools see of a running node: log lines, metrics, the status page."""
