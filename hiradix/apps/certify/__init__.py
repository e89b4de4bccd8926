"""`hiradix certify URL`: does a server with a prefix cache answer as it would without one?"""
