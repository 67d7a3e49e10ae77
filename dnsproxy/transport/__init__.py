"""The world of packets: datagrams, streams and upstream servers."""
