"""The proof, on the user's own script, that a restart is exact: `lightning-ft drill`, and the fixture of pytest.

`command` runs a script once, `runs` knows what it is told and what it leaves, `engine` runs it as often as a drill
needs, `diagnosis` says why two runs differ, and `verdict` is what comes out.
"""
