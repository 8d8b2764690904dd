"""`environment.name=verifiers`: tasksets and harnesses of the package verifiers. `host` and `rows` import it, in
separate processes, since it starts servers and loads the event loop; the worker's side is `hosted`."""
