"""Programs that tests start are forked from a process that has imported what they import.

Most of a node's start is the import of torch and transformers: some three seconds of a core, and
hundreds of tests start two nodes each. So while the tests run, `subprocess.Popen` is `Forking`
(`popen.py`). Where it is asked for a program of ours, it does not begin a new Python. It asks a
server (`server.py`), which has imported all of it and has no threads, to fork. The new process is
a child of whoever asked, as if it had been started, with the same descriptors, environment, folder,
signals and process group.

A program is started really, by a new Python, if something differs that libraries read when they are
loaded (an environment variable, a limit), or if a test has the mark `really`.
"""
