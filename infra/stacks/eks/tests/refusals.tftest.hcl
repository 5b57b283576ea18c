# Values that would fail on AWS an hour later, or cost money and compute nothing, are refused before anything is planned.

mock_provider "aws" {
  source = "../mocks"
}

variables {
  region  = "us-west-2"
  zone_id = "usw2-az4"
}

run "a_region_without_trainium" {
  command = plan
  variables {
    region  = "eu-central-1"
    zone_id = "euc1-az1"
  }
  expect_failures = [var.region]
}

run "a_zone_that_does_not_offer_the_type_and_a_capacity_block_without_an_end" {
  command = plan
  variables {
    zone_id  = "usw2-az2"
    capacity = { kind = "capacity_block", reservation_id = "cr-0123456789abcdef0" }
  }
  expect_failures = [var.zone_id, var.capacity]
}

run "a_zone_that_offers_trn1_and_not_trn1n_and_an_unknown_kind_of_capacity" {
  command = plan
  variables {
    zone_id  = "usw2-az1"
    trainium = { shape = "trn1n.32xlarge" }
    capacity = { kind = "spot" }
  }
  expect_failures = [var.zone_id, var.capacity]
}

run "a_type_that_ec2_has_withdrawn_from_the_zone_and_an_ami_that_aws_has" {
  command = plan
  override_data {
    target = data.aws_ec2_instance_type_offerings.zone
    values = { instance_types = ["trn1.32xlarge"] }
  }
  override_data {
    target = data.aws_ami_ids.node["neuron"]
    values = { ids = [] }
  }
  expect_failures = [data.aws_ec2_instance_type_offerings.zone, data.aws_ami_ids.node["neuron"]]
}

run "trn2_in_a_region_without_it_and_a_reservation_that_nothing_would_use" {
  command = plan
  variables {
    trainium = { shape = "trn2.48xlarge" }
    capacity = { reservation_id = "cr-0123456789abcdef0" }
  }
  expect_failures = [var.zone_id, var.capacity]
}

run "a_zone_by_its_name_and_a_reservation_without_an_id" {
  command = plan
  variables {
    zone_id  = "us-west-2d"
    capacity = { kind = "reservation" }
  }
  expect_failures = [var.zone_id, var.capacity]
}

run "a_pool_over_two_zones_and_a_capacity_block_without_an_id" {
  command = plan
  variables {
    zone_id  = "usw2-az4,usw2-az1"
    capacity = { kind = "capacity_block", ends_at = "2027-01-31T11:30:00Z" }
  }
  expect_failures = [var.zone_id, var.capacity]
}

run "an_unknown_type" {
  command = plan
  variables {
    trainium = { shape = "trn9.32xlarge" }
  }
  expect_failures = [var.trainium]
}

run "a_type_with_gpus_for_any_nodes" {
  command = plan
  variables {
    trainium   = { shape = "p5.48xlarge" }
    cpu_nodes  = { shape = "p5.4xlarge" }
    core_nodes = { shape = "p5.4xlarge" }
  }
  expect_failures = [var.trainium, var.cpu_nodes, var.core_nodes]
}

run "no_nodes_at_all" {
  command = plan
  variables {
    trainium = { max_nodes = 0 }
  }
  expect_failures = [var.trainium]
}

run "more_nodes_than_the_subnet_has_addresses" {
  command = plan
  variables {
    network  = { cidr = "10.9.0.0/22" }
    trainium = { max_nodes = 6 }
  }
  expect_failures = [var.trainium]
}

run "an_end_that_is_no_time" {
  command = plan
  variables {
    capacity = { kind = "reservation", reservation_id = "cr-0123456789abcdef0", ends_at = "friday" }
  }
  expect_failures = [var.capacity]
}

run "a_capacity_block_of_a_type_that_has_none" {
  command = plan
  variables {
    trainium = { shape = "trn1n.32xlarge" }
    capacity = { kind = "capacity_block", reservation_id = "cr-0123456789abcdef0", ends_at = "2027-01-31T11:30:00Z" }
  }
  expect_failures = [var.capacity]
}

run "a_placement_group_with_a_capacity_block" {
  command = plan
  variables {
    placement_group = "ours"
    capacity        = { kind = "capacity_block", reservation_id = "cr-0123456789abcdef0", ends_at = "2027-01-31T11:30:00Z" }
  }
  expect_failures = [var.placement_group]
}

run "values_that_aws_does_not_take" {
  command = plan
  variables {
    name                 = "Mill Race"
    fsx                  = { gib = 3600 }
    efa_layout           = "ena"
    operators            = ["arn:aws:sts::111122223333:assumed-role/research/you"]
    budget               = { emails = ["you"] }
    log_retention_days   = 10
    cpu_nodes            = { shape = "trn1.32xlarge" }
    core_nodes           = { shape = "m1.small" }
    cpu_ami_release      = "1.35.6-20260714"
    kubernetes_support   = "PREMIUM"
    permissions_boundary = "boundary"
  }
  expect_failures = [
    var.name,
    var.fsx,
    var.efa_layout,
    var.operators,
    var.budget,
    var.log_retention_days,
    var.cpu_nodes,
    var.core_nodes,
    var.cpu_ami_release,
    var.kubernetes_support,
    var.permissions_boundary,
  ]
}

run "an_ami_whose_driver_is_for_another_generation" {
  command = plan
  variables {
    ami_release = "20261119"
  }
  expect_failures = [var.ami_release]
}

run "values_that_make_no_sense" {
  command = plan
  variables {
    network            = { cidr = "10.0.0.0/28" }
    fsx                = { throughput = 200 }
    budget             = { monthly_dollars = 0 }
    cpu_nodes          = { shape = "m7i.2xlarge" }
    core_nodes         = { nodes = 0 }
    api_public_cidrs   = ["0.0.0.0/0"]
    kubernetes_version = "1.33"
  }
  expect_failures = [
    var.network,
    var.fsx,
    var.budget,
    var.cpu_nodes,
    var.core_nodes,
    var.api_public_cidrs,
    var.kubernetes_version,
  ]
}

run "a_run_with_a_name_that_no_run_has" {
  command = plan
  variables {
    run = "Llama 2"
  }
  expect_failures = [var.run]
}
