"""A network in a box: private namespaces, a tiny name server, and a walk through the product."""
