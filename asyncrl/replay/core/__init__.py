"""What is true of groups: events, the state they change, the ledger, the gates. Pure: no clock of its own, no socket,
no file, no thread. Time and events come in, decisions go out; server, simulator and tests drive the same classes."""
