"""The process that runs chat templates: a template is somebody else's program.

    renderer ── requests ──> template process      a fork of the server, locked down before it reads a template
       │  <── plain data ──        │
       └─ starts ─> fork server ─ forks and ends    a fresh interpreter: no environment, no descriptors, no templates

client        the renderer's side: sends requests, enforces limits on time and memory
channel       starts fork servers and processes, and exchanges frames with them
messages      what is sent, and the checks of what comes back
fork_server   the server, and the loop of a process
engine        what a template process does
lockdown      limits and system call filter of a process
"""
