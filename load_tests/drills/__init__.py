"""What can go wrong around a server, done to it on purpose. `load_tests/chaos.py` runs the drills."""
