"""Chat templates are untrusted code, so they run in a separate process.

    renderer ── requests ──> template process      a fork of the server, locked down before it reads a template
       │  <── plain data ──        │
       └─ starts ─> fork server ─ forks and ends    a fresh interpreter: no environment, no descriptors, no templates

client        sends requests for the renderer, and enforces limits on time and memory
channel       starts fork servers and processes, and exchanges frames with them
messages      the messages of the protocol, and checks on the responses
fork_server   the fork server, and the request loop of a process
engine        opens templates and answers requests in a template process
lockdown      resource limits and system call filter of a process
"""
