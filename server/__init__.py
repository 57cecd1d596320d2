"""The server: what clients, the command line and the system see. It joins the other packages, and alone makes status
codes of their errors."""
