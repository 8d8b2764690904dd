"""`environment.name=tools`: a policy that calls functions. `environment` is the episode; functions of the user run in
processes of `host`, never in the worker; `mcp_servers` talks to servers of the Model Context Protocol."""
