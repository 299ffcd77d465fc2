"""How the speaking checkpoint is made: synthetic speech, a codec, a talker, and what came of them.

Nothing here is imported by the server; README.md beside this file is the runbook.
"""
