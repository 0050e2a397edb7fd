// Package podgroups pins the modules whose types and CRDs of PodGroups are installed.
package podgroups

import (
	_ "sigs.k8s.io/scheduler-plugins/apis/scheduling/v1alpha1"
	_ "volcano.sh/apis/pkg/apis/scheduling/v1beta1"
)
