# Trainium nodes by themselves: what EC2 and EKS would be asked for, for each way to have them.

mock_provider "aws" {
  source = "../mocks"
}

variables {
  name               = "trainium"
  cluster            = { name = "millrace", version = "1.35", security_group_id = "sg-cluster" }
  node_role_arn      = "arn:aws:iam::111122223333:role/node"
  ready_for_nodes    = {}
  shape              = { name = "trn1.32xlarge", neuron_devices = 16, efa_cards = 8, huge_pages_gib = 10, supports_capacity_block = true, supports_placement_group = true }
  max_nodes          = 4
  subnets            = [{ id = "subnet-0", zone_id = "usw2-az4" }]
  security_group_ids = ["sg-efa", "sg-fsx"]
  key_arn            = "arn:aws:kms:us-west-2:111122223333:key/11111111-2222-3333-4444-555555555555"
  efa_layout         = "efa"
  capacity           = { kind = "on_demand", reservation_id = "" }
  placement_group    = "auto"
  labels             = { "millrace.dev/pool" = "trainium" }
  taint              = { key = "aws.amazon.com/neuron", value = "true", effect = "NoSchedule" }
  tags               = { "millrace.dev/stack" = "millrace" }
  ami_release        = "1.35.4-20260505"
}

run "on_demand" {
  command = plan
  module {
    source = "../../modules/trn-nodes"
  }

  assert {
    condition = [for each in aws_launch_template.this.network_interfaces : [each.network_card_index, each.device_index, each.interface_type]] == [
      [0, 0, "efa"], [1, 1, "efa"], [2, 1, "efa"], [3, 1, "efa"], [4, 1, "efa"], [5, 1, "efa"], [6, 1, "efa"], [7, 1, "efa"],
    ]
    error_message = "interfaces: ${jsonencode(aws_launch_template.this.network_interfaces)}"
  }

  assert {
    condition = alltrue([
      for each in aws_launch_template.this.network_interfaces :
      each.security_groups == toset(["sg-cluster", "sg-efa", "sg-fsx"]) && each.associate_public_ip_address == null
    ])
    error_message = "every interface is in the cluster's, EFA's and Lustre's groups and asks for no public address"
  }

  assert {
    condition     = [aws_eks_node_group.this.ami_type, aws_eks_node_group.this.release_version, aws_eks_node_group.this.capacity_type] == ["AL2023_x86_64_NEURON", "1.35.4-20260505", "ON_DEMAND"]
    error_message = "${aws_eks_node_group.this.ami_type}, ${aws_eks_node_group.this.release_version}, ${aws_eks_node_group.this.capacity_type}"
  }

  assert {
    condition     = [aws_eks_node_group.this.scaling_config[0].desired_size, aws_eks_node_group.this.scaling_config[0].min_size, aws_eks_node_group.this.scaling_config[0].max_size] == [0, 0, 4]
    error_message = "nodes: ${jsonencode(aws_eks_node_group.this.scaling_config)}"
  }

  assert {
    condition     = [for each in aws_eks_node_group.this.taint : [each.key, each.value, each.effect]] == [["aws.amazon.com/neuron", "true", "NO_SCHEDULE"]]
    error_message = "taint: ${jsonencode(aws_eks_node_group.this.taint)}"
  }

  assert {
    condition     = aws_placement_group.this[0].strategy == "cluster" && aws_launch_template.this.placement[0].group_name == "millrace-trainium"
    error_message = "placement: ${jsonencode(aws_launch_template.this.placement)}"
  }

  assert {
    condition     = length(aws_launch_template.this.instance_market_options) == 0 && length(aws_launch_template.this.capacity_reservation_specification) == 0
    error_message = "nothing is reserved"
  }

  assert {
    condition     = aws_launch_template.this.metadata_options[0].http_tokens == "required" && aws_launch_template.this.metadata_options[0].http_put_response_hop_limit == 1
    error_message = "metadata: ${jsonencode(aws_launch_template.this.metadata_options)}"
  }

  assert {
    condition     = aws_launch_template.this.block_device_mappings[0].ebs[0].encrypted == "true"
    error_message = "the root volume is encrypted"
  }

  assert {
    condition     = base64decode(aws_launch_template.this.user_data) == output.user_data && strcontains(output.user_data, "pages=5128")
    error_message = "user data: ${output.user_data}"
  }
}

run "interfaces_without_addresses" {
  command = plan
  module {
    source = "../../modules/trn-nodes"
  }
  variables {
    efa_layout = "efa-only"
  }

  assert {
    condition     = [for each in aws_launch_template.this.network_interfaces : each.interface_type] == ["efa", "efa-only", "efa-only", "efa-only", "efa-only", "efa-only", "efa-only", "efa-only"]
    error_message = "only the first interface has an address"
  }
}

run "sixteen_cards" {
  command = plan
  module {
    source = "../../modules/trn-nodes"
  }
  variables {
    shape = { name = "trn2.48xlarge", neuron_devices = 16, efa_cards = 16, huge_pages_gib = 10, supports_capacity_block = true, supports_placement_group = true }
  }

  assert {
    condition     = aws_launch_template.this.network_interfaces[*].network_card_index == range(16)
    error_message = "an interface on each card"
  }
}

run "a_capacity_block" {
  command = plan
  module {
    source = "../../modules/trn-nodes"
  }
  variables {
    capacity = { kind = "capacity_block", reservation_id = "cr-0123456789abcdef0" }
  }

  assert {
    condition     = aws_eks_node_group.this.capacity_type == "CAPACITY_BLOCK" && aws_launch_template.this.instance_market_options[0].market_type == "capacity-block"
    error_message = "EKS and EC2 both have to be told"
  }

  assert {
    condition     = aws_launch_template.this.capacity_reservation_specification[0].capacity_reservation_target[0].capacity_reservation_id == "cr-0123456789abcdef0" && aws_launch_template.this.instance_type == "trn1.32xlarge"
    error_message = "the template names the block and the type"
  }

  assert {
    condition     = length(aws_placement_group.this) == 0 && length(aws_launch_template.this.placement) == 0
    error_message = "a block is placed already"
  }
}

run "a_reservation_in_a_placement_group" {
  command = plan
  module {
    source = "../../modules/trn-nodes"
  }
  variables {
    capacity        = { kind = "reservation", reservation_id = "cr-0123456789abcdef0" }
    placement_group = "ours"
  }

  assert {
    condition     = length(aws_placement_group.this) == 0 && aws_launch_template.this.placement[0].group_name == "ours" && aws_eks_node_group.this.capacity_type == "ON_DEMAND"
    error_message = "placement: ${jsonencode(aws_launch_template.this.placement)}"
  }
}

run "refuses_two_zones" {
  command = plan
  module {
    source = "../../modules/trn-nodes"
  }
  variables {
    subnets = [{ id = "subnet-0", zone_id = "usw2-az4" }, { id = "subnet-1", zone_id = "usw2-az1" }]
  }
  expect_failures = [var.subnets]
}

run "refuses_a_placement_group_with_a_capacity_block" {
  command = plan
  module {
    source = "../../modules/trn-nodes"
  }
  variables {
    capacity        = { kind = "capacity_block", reservation_id = "cr-0123456789abcdef0" }
    placement_group = "ours"
  }
  expect_failures = [var.placement_group]
}

run "refuses_a_type_without_efa" {
  command = plan
  module {
    source = "../../modules/trn-nodes"
  }
  variables {
    shape = { name = "m7i.8xlarge", neuron_devices = 0, efa_cards = 0, huge_pages_gib = 0, supports_capacity_block = false, supports_placement_group = true }
  }
  expect_failures = [var.shape]
}
