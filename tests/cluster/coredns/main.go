// CoreDNS with the plugins that answer for a cluster's Services, and no others.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() {
	// The order is that of the chain that a query passes.
	dnsserver.Directives = []string{"bind", "errors", "ready", "cache", "kubernetes"}
	coremain.Run()
}
