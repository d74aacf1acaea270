"""Examples of the client. Each is a program: python -m client.examples.NAME ROUTER_URL [KEY_FILE]"""
