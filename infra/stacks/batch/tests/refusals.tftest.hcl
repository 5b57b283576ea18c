# What would fail on AWS an hour later, or cost money and compute nothing, is refused before anything is planned.

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
    trainium  = { shape = "p5.48xlarge" }
    cpu_nodes = { shape = "p5.4xlarge" }
  }
  expect_failures = [var.trainium, var.cpu_nodes]
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
    trainium = { max_nodes = 14 }
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
    ami_id               = "al2023"
    hugging_face_secret  = "hf_abc"
    checkpoint_gb        = 0
    permissions_boundary = "boundary"
    queue_limits         = { capacity_seconds = 60 }
  }
  expect_failures = [
    var.name,
    var.fsx,
    var.efa_layout,
    var.operators,
    var.budget,
    var.log_retention_days,
    var.cpu_nodes,
    var.ami_id,
    var.hugging_face_secret,
    var.checkpoint_gb,
    var.permissions_boundary,
    var.queue_limits,
  ]
}

run "values_that_make_no_sense" {
  command = plan
  variables {
    network             = { cidr = "10.0.0.0/28" }
    fsx                 = { throughput = 200 }
    budget              = { monthly_dollars = 0 }
    cpu_nodes           = { shape = "m7i.2xlarge" }
    hugging_face_secret = "arn:aws:secretsmanager:us-east-1:111122223333:secret:hugging-face"
    queue_limits        = { misconfiguration_seconds = 100000 }
  }
  expect_failures = [
    var.network,
    var.fsx,
    var.budget,
    var.cpu_nodes,
    var.hugging_face_secret,
    var.queue_limits,
  ]
}

run "a_config_that_is_not_there" {
  command = plan
  variables {
    config = "tests/configs/nowhere.txt"
  }
  expect_failures = [var.config]
}

run "a_config_of_another_region" {
  command = plan
  variables {
    config = "tests/configs/other-region.txt"
  }
  expect_failures = [terraform_data.given]
}

run "a_file_system_without_its_mount_name" {
  command = plan
  variables {
    config = "tests/configs/half-a-file-system.txt"
  }
  expect_failures = [terraform_data.given]
}

run "groups_of_an_unknown_vpc" {
  command = plan
  variables {
    config = "tests/configs/groups-without-subnet.txt"
  }
  expect_failures = [terraform_data.given]
}

run "a_file_system_that_lets_no_node_in" {
  command = plan
  variables {
    config = "tests/configs/file-system-without-groups.txt"
  }
  expect_failures = [terraform_data.given]
}

run "blanks_between_ids" {
  command = plan
  variables {
    config = "tests/configs/blanks.txt"
  }
  expect_failures = [terraform_data.given]
}

run "an_image_for_a_repository" {
  command = plan
  variables {
    config = "tests/configs/an-image.txt"
  }
  expect_failures = [terraform_data.given]
}

run "two_subnets" {
  command = plan
  variables {
    config = "tests/configs/two-subnets.txt"
  }
  expect_failures = [terraform_data.given]
}

run "the_config_that_the_stack_itself_wrote" {
  command = plan
  variables {
    config = "tests/configs/of-this-stack.txt"
  }
  expect_failures = [terraform_data.given]
}

run "a_subnet_of_another_zone" {
  command = plan
  variables {
    zone_id = "usw2-az1"
    config  = "tests/configs/subnet.txt"
  }
  expect_failures = [data.aws_subnet.given]
}

run "an_ami_whose_driver_nobody_knows" {
  command = plan
  variables {
    ami_id = "ami-0fedcba9876543210"
  }
  override_data {
    target = data.aws_ami.trainium
    values = { id = "ami-0fedcba9876543210", name = "al2023-ami-ecs-neuron-hvm-2023.0.20260820-kernel-6.1-x86_64" }
  }
  expect_failures = [data.aws_ami.trainium]
}

run "a_public_subnet" {
  command = plan
  variables {
    config = "tests/configs/subnet.txt"
  }
  override_data {
    target = data.aws_subnet.given[0]
    values = { id = "subnet-0fedcba9876543210", vpc_id = "vpc-given", availability_zone_id = "usw2-az4", map_public_ip_on_launch = true }
  }
  expect_failures = [data.aws_subnet.given]
}

run "a_role_that_is_no_instance_profile" {
  command = plan
  variables {
    config = "tests/configs/a-role.txt"
  }
  expect_failures = [terraform_data.given]
}

run "a_config_with_quotes" {
  command = plan
  variables {
    config = "tests/configs/quotes.txt"
  }
  expect_failures = [terraform_data.given]
}
