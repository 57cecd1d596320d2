"""The server: what clients, the command line and the system see. It joins the other packages, and is the only one that
turns their errors into status codes."""
