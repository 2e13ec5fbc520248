"""Training of DLite drafters: capture what a target does, align a student with it, measure it."""
