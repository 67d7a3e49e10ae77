// One lookup by Go's own resolver: its outcome and how long it took.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"
)

func main() {
	resolver := &net.Resolver{PreferGo: true}
	start := time.Now()
	found, err := resolver.LookupIPAddr(context.Background(), os.Args[1])
	outcome := "ok"
	if dns, is := err.(*net.DNSError); is {
		outcome = dns.Err
	}
	fmt.Printf("%s, %d addresses, %d ms\n", outcome, len(found), time.Since(start).Milliseconds())
}
