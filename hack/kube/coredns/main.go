// Command coredns is CoreDNS with the few plugins that answer cluster DNS in the node tests. The stock program also links every
// cloud provider's DNS client, which doubles the time it takes to compile.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() {
	// CoreDNS runs plugins in the order of this list and refuses a Corefile that names one outside it.
	dnsserver.Directives = []string{"ready", "health", "errors", "cache", "kubernetes"}
	coremain.Run()
}
