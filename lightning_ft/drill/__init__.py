"""The proof, on the user's own script, that a restart is exact: `lightning-ft drill`, and the fixture of pytest.

`command` runs a script once, `runs` knows what it is told and what it leaves, `points` where it is killed, `engine`
runs it as often as a drill needs, `endings` says why a run failed, `diagnosis` why two runs differ, `unrestored` what
a restart did not begin with, and `verdict` is what comes out.
"""
