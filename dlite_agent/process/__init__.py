"""The model in a process of its own: the host that starts it, the child, and the pipe."""
